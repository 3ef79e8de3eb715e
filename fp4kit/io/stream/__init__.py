# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors in chunks of bounded memory: read ahead, through a backend, written behind."""
