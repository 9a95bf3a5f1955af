"""``hangrig watch``: the watchdog on an engine that hangrig did not start.

``run`` is one watch from the first look to the stored diagnosis; ``looks`` what a look holds, ``sources``,
``activity`` and ``metrics`` where it comes from, ``rules`` what it means (pure), ``evidence`` what is stored,
``text`` the words, ``command`` the seam to the command line, ``guard`` the process beside a pytest whose tests
are watched. What stacks of an engine mean is
`harness.stack_places`, who is who `harness.process_tree`, the cause `harness.diagnosis_stacks`. Not here: engines
that hangrig starts; those have agents, ledgers and a target.
"""
