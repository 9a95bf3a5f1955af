"""`hangrig audit`: reads an engine's Python source and names what hangs, or stops an engine, on another platform.

Here: finding the files, the rules, suppression and baseline, what is printed. Nothing that is audited is imported
or run; a package's name is looked up without importing it. Not here: options and exit statuses (`harness.cli`).

A module a noun: `source` (which files), `module` (one parsed file), `findings` (what a rule says), `rules` (the
table), a module a rule, `scan` (all files on all cores), `suppress`, `baseline`, `command`, `sarif`.
"""
