"""``python -m nearpolicy COMMAND`` is ``nearpolicy COMMAND``."""

from nearpolicy.launch.cli import main

if __name__ == "__main__":
    main()
