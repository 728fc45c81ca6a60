"""``python -m tests.golden``: compare what the planner makes of the conversations with what is pinned.

``--write`` pins it anew, for the sets that are named (``shipped``, ``soak``, ``shared``; all that are there without a
name). ``--dump FOLDER`` writes every decision, body and edit as text, so that two versions can be compared with diff.
"""

import argparse
from pathlib import Path

from tests.golden.corpus import SETS, SHARED
from tests.golden.pinned import differing, play_set, read, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("sets", nargs="*", help="which sets; all without a name")
    parser.add_argument("--write", action="store_true", help="pin what the planner does now")
    parser.add_argument("--dump", type=Path, help="a folder for the text of what was decided")
    options = parser.parse_args()
    failed = False
    for name in options.sets or [name for name in SETS if name != "shared" or SHARED.exists()]:
        played = play_set(name, dump=options.dump)
        if options.write:
            write(name, played)
        changed = differing(read(name), played)
        failed |= bool(changed)
        print(f"{name}: {len(played)} conversations, {len(changed)} differ", *changed, sep="\n  ")
    return int(failed)


raise SystemExit(main())
