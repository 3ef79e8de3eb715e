// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// kernels_cu/common/async_copy.cuh on the host. A copy overwrites its target with a pattern when it
// begins, and with its source when somebody waits for it: who reads before that, or goes on reading
// what is overwritten, reads the pattern.
#pragma once

#include <deque>
#include <map>

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

// ---- Barriers that count arrivals and bytes ----

struct Barrier {
  unsigned arrivals, arrived, expected, phase;
};
inline std::map<const void*, Barrier> barriers;

struct Awaited {
  const void* barrier;
  Copy copy;
  bool counts;  // among the expected bytes
};
inline std::vector<Awaited> awaited;

inline void init(void* barrier, unsigned arrivals) {
  barriers[barrier] = Barrier{arrivals, 0, 0, 0};
  const auto of_this = [barrier](const Awaited& each) { return each.barrier == barrier; };
  awaited.erase(std::remove_if(awaited.begin(), awaited.end(), of_this), awaited.end());
}

inline void arrive(void* barrier) {
  Barrier& state = barriers.at(barrier);
  if (++state.arrived > state.arrivals) host_gpu::fail("more arrivals than a phase has");
}

inline void expect(void* barrier, unsigned bytes) {
  barriers.at(barrier).expected += bytes;
  arrive(barrier);
}

inline void copy_bulk(void* barrier, void* target, const void* source, unsigned bytes) {
  const Copy copy{target, source, bytes};
  begin(copy, 16);
  awaited.push_back({barrier, copy, true});
}

// Those of this thread that nobody has waited for.
inline void arrive_copies(void* barrier) {
  commit();
  for (const auto& closed : mine().closed) {
    for (const Copy& copy : closed) awaited.push_back({barrier, copy, false});
  }
  mine().closed.clear();
  arrive(barrier);
}

// Ends a phase if it can be. Returns whether it is over.
inline bool is_over(void* barrier, unsigned parity) {
  Barrier& state = barriers.at(barrier);
  if (state.phase % 2 != parity) return true;
  unsigned bytes = 0;
  for (const Awaited& each : awaited) {
    if (each.barrier == barrier && each.counts) bytes += each.copy.bytes;
  }
  if (state.arrived < state.arrivals || bytes < state.expected) return false;
  if (bytes > state.expected) host_gpu::fail("more bytes than are waited for");
  std::vector<Awaited> rest;
  for (const Awaited& each : awaited) {
    if (each.barrier == barrier) {
      end(each.copy);
    } else {
      rest.push_back(each);
    }
  }
  awaited = std::move(rest);
  state = Barrier{state.arrivals, 0, 0, state.phase + 1};
  return true;
}

inline void wait_bytes(void* barrier, unsigned parity) {
  if (!is_over(barrier, parity)) host_gpu::poll(is_over, barrier, parity);
}

}  // namespace host_copies
