"""The multi-host lab: several hosts with rate-limited links on one machine; see docs/lab.md."""
