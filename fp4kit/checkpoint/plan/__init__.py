# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What an operation does with each tensor, decided from headers and JSON files."""
