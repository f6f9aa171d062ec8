"""What conversions raise."""

__all__ = ["CheckpointError", "VerificationError"]


class CheckpointError(Exception):
    """A checkpoint cannot be read, converted or written; the message names the file or tensor and the way out."""


class VerificationError(CheckpointError):
    """The converted checkpoint does not compute what its source does; nothing was written."""
