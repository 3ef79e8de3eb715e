# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Stored tensors of any form as logical ones, computed while they are read."""
