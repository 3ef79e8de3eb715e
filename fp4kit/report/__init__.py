# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Reports as pages: `--html`. The data is a JSON report; a page adds what is only seen there."""
