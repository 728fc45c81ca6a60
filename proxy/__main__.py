"""``python -m proxy`` is ``weir``."""

from proxy.cli import main

if __name__ == "__main__":
    main()
