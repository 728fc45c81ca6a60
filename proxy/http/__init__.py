"""HTTP routes: they parse, call and respond; they decide nothing."""
