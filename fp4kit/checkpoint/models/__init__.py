# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What is known of models: their names, what engines fuse, how experts lie."""
