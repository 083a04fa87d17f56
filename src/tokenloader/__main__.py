"""`python -m tokenloader`: the command line."""

from tokenloader.cli.commands import main

if __name__ == "__main__":
    main()
