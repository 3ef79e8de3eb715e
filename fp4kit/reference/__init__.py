# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The NumPy arithmetic that decides every byte, and the backend that runs it as it stands."""
