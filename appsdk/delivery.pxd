# The types of appsdk/delivery.py where it is compiled.

from appsdk.context cimport Context
