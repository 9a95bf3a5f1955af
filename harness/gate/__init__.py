"""The gate: may pinned memory be enabled on a platform? A rule with numbers over stored runs and litmus results.

``evidence`` reads, all else is pure: ``model`` (what was seen, what was decided), ``platforms`` (what may be
counted together), ``counting`` (trials by pool and arm), ``needs`` (what a yes takes), ``blame`` (which of four
arms tell what is at fault), ``commands`` (how to get what is missing), ``decision``. Not here: the measured gain,
which `reports.compare` measures, and how it reads for people (`reports.gate`). docs/gate.md has the rule.
"""
