// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// kernels_cu/common/async_copy.cuh on the host. A copy overwrites its target with a pattern when it
// begins, and with its source when somebody waits for it: who reads before that, or goes on reading
// what is overwritten, reads the pattern.
#pragma once

#include <deque>

namespace host_copies {

struct Copy {
  void* target;
  const void* source;
  unsigned bytes;
};

inline void begin(const Copy& copy, unsigned alignment) {
  const auto source = reinterpret_cast<std::uintptr_t>(copy.source);
  const auto target = reinterpret_cast<std::uintptr_t>(copy.target);
  if ((source | target | copy.bytes) % alignment != 0) host_gpu::fail("misaligned copy");
  const auto* bytes = static_cast<const unsigned char*>(copy.source);
  for (unsigned i = 0; i < copy.bytes; ++i) host_gpu::check_access(bytes + i);
  std::memset(copy.target, host_gpu::kPattern, copy.bytes);
}

inline void end(const Copy& copy) { std::memcpy(copy.target, copy.source, copy.bytes); }

// ---- Groups of copies of each thread ----

struct Groups {
  unsigned block = ~0u;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> closed;
};

inline std::vector<Groups> all_groups(1024);

inline Groups& mine() {
  Groups& groups = all_groups[threadIdx.x];
  if (groups.block != blockIdx.x) groups = Groups{blockIdx.x, {}, {}};
  return groups;
}

inline void copy_async(void* target, const void* source, unsigned bytes) {
  const Copy copy{target, source, bytes};
  begin(copy, bytes);
  mine().open.push_back(copy);
}

inline void commit() {
  mine().closed.push_back(std::move(mine().open));
  mine().open.clear();
}

inline void wait(unsigned left) {
  for (auto& closed = mine().closed; closed.size() > left; closed.pop_front()) {
    for (const Copy& copy : closed.front()) end(copy);
  }
}

// ---- Barriers that count bytes ----

struct Barrier {
  unsigned expected;
  unsigned phase : 31, is_expected : 1;
};

struct Bulk {
  const void* barrier;
  Copy copy;
};
inline std::vector<Bulk> bulks;

inline void init(void* barrier) {
  new (barrier) Barrier{0, 0, 0};
  const auto of_this = [barrier](const Bulk& each) { return each.barrier == barrier; };
  bulks.erase(std::remove_if(bulks.begin(), bulks.end(), of_this), bulks.end());
}

inline void expect(void* barrier, unsigned bytes) {
  auto& state = *static_cast<Barrier*>(barrier);
  if (state.is_expected) host_gpu::fail("a phase begins before the one before has ended");
  state.expected = bytes;
  state.is_expected = 1;
}

inline void copy_bulk(void* barrier, void* target, const void* source, unsigned bytes) {
  const Copy copy{target, source, bytes};
  begin(copy, 16);
  bulks.push_back({barrier, copy});
}

// The first that waits ends the phase. Kernels must have begun all copies of it before.
inline void wait_bytes(void* barrier, unsigned parity) {
  auto& state = *static_cast<Barrier*>(barrier);
  if (state.phase % 2 != parity) return;
  if (!state.is_expected) host_gpu::fail("waits for copies that nobody has begun");
  unsigned bytes = 0;
  std::vector<Bulk> rest;
  for (const Bulk& each : bulks) {
    if (each.barrier != barrier) {
      rest.push_back(each);
      continue;
    }
    end(each.copy);
    bytes += each.copy.bytes;
  }
  bulks = std::move(rest);
  if (bytes != state.expected) host_gpu::fail("waits for other bytes than were copied");
  state.is_expected = 0;
  ++state.phase;
}

}  // namespace host_copies
