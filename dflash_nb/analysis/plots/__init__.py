"""One function a question. Each takes result objects, never paths, and returns a :class:`~.style.Plot` with its finding.

``lengths`` answers notebook 00, ``buckets`` 01, ``padding`` 02, ``training`` 03 and ``diagnosis`` 04; ``style`` holds the common look.
"""
