# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints: planning, converting, reading and verifying model directories."""
