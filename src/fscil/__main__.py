"""`python -m fscil` is the command `fscil`."""

from fscil.cli import main

if __name__ == "__main__":
    main()
