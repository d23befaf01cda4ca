"""`python -m farl` is the command `farl`."""

from farl.cli import main

if __name__ == "__main__":
    main()
