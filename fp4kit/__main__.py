# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m fp4kit` is the `fp4kit` command."""

from .cli.entry import main

if __name__ == "__main__":
    main()
