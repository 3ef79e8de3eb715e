# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files and checkpoints from Python: what the command line does, and access like that of a dict."""
