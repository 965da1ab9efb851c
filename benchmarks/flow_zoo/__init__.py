"""Flows of six libraries, trained in seconds to minutes, some with planted defects, and the truth about what each may be used for.

`data` draws what they are trained on, `views` calls each library by its own interface, `flows` lists the zoo, `defects` breaks some of
it, and `truth` says what is true of each, without the audit's code.
"""
