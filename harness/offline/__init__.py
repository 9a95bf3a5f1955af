"""``hangrig diagnose``: a diagnosis of dumps that were brought from elsewhere, whatever part of them there is.

From a directory to an answer: ``files`` finds what lies there and ``recognise`` says what each file is, by its
content (``tables``: process tables as text, ``flight_recorder`` and ``flight_groups``: PyTorch's); ``seating`` says
whom a dump speaks of, ``gather`` puts dumps into samples; ``opinion`` says whether anything is wrong at all, for
evidence that nobody watched being taken, ``by_ledgers`` asks the rules of a run, ``missing`` says what is lacking,
and ``verdict`` puts the answers together; ``text`` has the words and ``command`` the seam to the command line.
Causes themselves are ``harness.diagnose``, ``harness.diagnosis_flight`` and ``harness.diagnosis_stacks``. Nothing
here starts, signals or asks a process.
"""
