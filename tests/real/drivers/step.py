"""The tool of every client: says what step N found, in 300 to 900 tokens; waits where a file ``pause-N`` stands."""

import random
import sys
import time
from pathlib import Path

SECOND = "1b"
"""The second call of the first answer."""
HERE = Path(__file__).parent
WORDS = [
    "server",
    "request",
    "file",
    "module",
    "path",
    "value",
    "index",
    "error",
    "result",
    "class",
    "function",
    "import",
    "token",
    "buffer",
    "stream",
]


def run(step: str) -> str:
    """Note that the step ran, and what it found."""
    with (HERE / "steps.log").open("a") as log:
        log.write(f"{step}\n")
    pause = HERE / f"pause-{step}"
    if pause.exists():
        (HERE / "paused").touch()
        until = time.monotonic() + 60
        while pause.exists() and time.monotonic() < until:
            time.sleep(0.05)
    return result(step)


def result(step: str) -> str:
    """What a step finds."""
    draw = random.Random(step)
    lines = [
        f"src/{draw.choice(WORDS)}_{step}.py:{draw.randint(1, 900)}: {' '.join(draw.choices(WORDS, k=8))}"
        for _ in range(draw.randint(16, 46))
    ]
    return "\n".join([*lines, f"[[step {step}]]"])


if __name__ == "__main__":
    print(run(sys.argv[1]))
