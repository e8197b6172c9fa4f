"""DeepSpeed's own unit tests, run over this library as a yardstick.

`make deepspeed-tests SUITE=DIR` runs them, where DIR is a checkout of DeepSpeed. The tests themselves are not copied.

- topics.py: which files count, and why the others do not.
- shim.py: what the processes of a test import first. It makes `import deepspeed` import this library.
- views.py: private names of DeepSpeed, as views of what this library has.
- launcher.py: DeepSpeed's launcher of ranks, adapted.
- plugin.py: the part in pytest: a daemon for the tests, and one line of JSON for each result.
- __main__.py: runs the files one after another, and sums the results by file and cause.
"""

# The environment variable with the path of the file to which the plugin appends a line of JSON for each result.
RESULTS_VARIABLE = "DEEPSPEED_SUITE_RESULTS"
# The environment variable with the most parameter sets of each test function that are run; 0: all.
SAMPLE_VARIABLE = "DEEPSPEED_SUITE_SAMPLE"
