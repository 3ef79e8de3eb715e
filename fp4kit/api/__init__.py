# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions: checks, one pipeline for every kind of call, and its results."""
