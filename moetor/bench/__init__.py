"""Numbers that can be trusted: checked against float64 first, then timed, peers in the same run.

shapes → cases (tensors) → peers (who runs them) → measure (check, time) → run (cells in a row)
→ report (JSON), page (markdown), plot. Roofs are measured on the machine of the run.
"""
