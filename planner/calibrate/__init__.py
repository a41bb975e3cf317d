"""From files of measured runs to corrections: reads run folders, tables and logs, and hands them to the fit."""
