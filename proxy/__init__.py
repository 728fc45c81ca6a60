"""The shell of Weir: sockets, database, tokenizer, telemetry, configuration."""
