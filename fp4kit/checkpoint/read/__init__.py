# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What stands in a checkpoint: directories, shards, headers, and what the JSON files say."""
