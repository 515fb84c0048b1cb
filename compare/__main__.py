"""`python -m compare`, which `./compare.sh` runs."""

from compare.program import main

if __name__ == "__main__":
    main()
