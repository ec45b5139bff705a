"""The module that each local rank runs: `python -m tuner.profile.rank DIRECTORY`, started by `tuner.profile.launch`."""

from tuner.profile.launch import profile_as_rank
from tuner.runtime.worker import main

if __name__ == "__main__":
    main(profile_as_rank)
