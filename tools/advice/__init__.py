"""The advice that `tuner` gives, followed: the parts of `tools/advice_campaign.py`."""
