"""Numbers that can be trusted: checked against float64 first, then timed, peers in the same run.

shapes, configs → cases (tensors) → peers (who runs them) → reference, measure (check, then time in turn), samplers
→ run (cells in a row) → report (the data, JSON by schema.json) → write: page (Markdown), html and svg, plot (PNG),
table (CSV). roofs are measured on the machine of the run; compare tells two reports apart; tune finds where
backends cross, for `auto`. whole_model and model_report are the same for a model of transformers, prefill and decode.
"""
