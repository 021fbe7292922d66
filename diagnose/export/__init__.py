"""A run's figures, in the forms that other tools read: one file per exporter.

Files without an underscore are exporters, found by looking into this folder. None imports the library it
writes with before it is asked to export; nothing here touches the process that trains.
"""
