"""The verification ladder: an artifact's graphs proven on this CPU, rung by rung, against transformers in float64.

`ladder.verify` runs it, `report` shows it; `cann-export verify` is in `command`.
"""
