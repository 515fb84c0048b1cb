"""`python -m simulate`, which `./simulate.sh` runs."""

from simulate.program import main

if __name__ == "__main__":
    main()
