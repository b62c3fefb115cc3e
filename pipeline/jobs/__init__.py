"""Jobs over the logs of a whole fleet. Each is a function of its own module and a verb of `immortal pipeline`.

sources    what a job reads: live logs, or an export of them
evidence   a record's facts on its streams           stream_audit   one stream against it      audit   all of them
export     logs to Parquet, what is new each time    verify         every check of everything
stats      how much, how fast, who with whom         trace          effects of a message       what_if every instance
"""
