"""What became of one message that a layer put in shorter words: for the trace and the audit, never its content."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensed:
    """The figures of one message (or group) that was condensed, or that was to be.

    Attributes:
        strategy: the kind of the edit.
        original_tokens: uncalibrated tokens of the message as the client sent it; of a history that is summarised
            again, of the summary before and of the messages that are newly taken out.
        compressed_tokens: the same as it is sent now; the original's where nothing came of it.
        calls: questions that the summariser answered; 0 where code wrote the text.
        purpose: the prompt's name and version; ``extract`` where code wrote the text.
        ref: the archive's key of the original.
        key: address of what was asked: the original's digest in hex, with the level behind it where there are several.
        failure: code of why there is no shorter text; empty if there is one.
    """

    strategy: str
    original_tokens: int
    compressed_tokens: int
    calls: int = 0
    purpose: str = ""
    ref: str = ""
    key: str = ""
    failure: str = ""

    @property
    def ratio(self) -> float:
        """How many times shorter the message is: original over compressed tokens, 1.0 where nothing came of it."""
        return self.original_tokens / self.compressed_tokens if self.compressed_tokens else 1.0
