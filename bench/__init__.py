"""Performance of the engine on two ranks, and of the harness on a few and on thousands, as ratios within one run.

One module a noun: ``settings.py`` how long, ``arms.py`` what is compared, ``rank.py`` the rank's side, ``pair.py``
the two processes, ``apart.py`` a function in a process of its own, ``ratio.py`` the arithmetic; ``*_figures.py``
what is measured (engine, ledger, captures, analysis of made-up evidence, latency of detection, first hang),
``synthetic*.py`` that evidence, ``results.py`` the stored document. A figure never says good or bad: thresholds
belong to people.
"""
