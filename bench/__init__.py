"""Performance of the engine and the harness on two ranks, always as ratios within one run.

One module a noun: ``settings.py`` how long, ``arms.py`` what is compared, ``rank.py`` the rank's side,
``pair.py`` the two processes, ``ratio.py`` the arithmetic, ``engine_figures.py`` and ``harness_figures.py`` what
is measured, ``results.py`` the stored document. A figure never says good or bad: thresholds belong to people.
"""
