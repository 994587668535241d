"""Plan, train and diagnose DFlash drafters (block-diffusion speculative decoding)."""

__version__ = "0.1.0"
