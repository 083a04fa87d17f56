"""The command line: arguments in, screens or JSON out."""
