"""`python -m packhouse`: the command line, where its script is not on the path."""

from packhouse.cli import main

if __name__ == "__main__":
    main()
