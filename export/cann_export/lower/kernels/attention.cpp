// Rotary embedding, cache write and causal paged attention of one layer, for any mix of decode rows and prefill chunks.
// Each sequence takes the path of its own rows: decode.h up to DECODE_ROWS, prefill.h above. The work is one list of
// independent tasks over all sequences; nothing about the batch changes the order of operations within a row.
#include <omp.h>

#include <atomic>
#include <cmath>

#include "kernels.h"
#include "prefill.h"
#include "scratch.h"

namespace {

constexpr int64_t DECODE_ROWS = 8;
constexpr int64_t SERIAL_ROWS = 4;         // rotated by one thread: cheaper than a barrier
constexpr int64_t SERIAL_MULTIPLIES = 200000;  // of queries with keys; below, one thread does the whole layer

// Rotates one head in the half mode: out[i] = x[i] cos[i] - x[i + D/2] sin[i] and its mirror.
template <class T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    Vec a = vload(x + i), b = vload(x + half + i);
    vstore(out + i, vsub(vmul(a, vload(cos + i)), vmul(b, vload(sin + i))));
    vstore(out + half + i, vadd(vmul(b, vload(cos + half + i)), vmul(a, vload(sin + half + i))));
  }
  for (; i < half; i++) {
    const float a = to_float(x[i]), b = to_float(x[half + i]);
    from_float(out + i, a * to_float(cos[i]) - b * to_float(sin[i]));
    from_float(out + half + i, b * to_float(cos[half + i]) + a * to_float(sin[half + i]));
  }
}

template <class T>
void scale_row(const float* x, float factor, T* out, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += W) vstore(out + d, vmul(vload(x + d), vset(factor)));
}

// One query row of one kv head over one range of keys, or a block of virtual rows of a prefill chunk.
struct Task {
  int64_t seq, kv_head;
  int64_t first;  // decode: first key. prefill: first virtual row
  int64_t row;    // decode: row of T. prefill: -1
  int64_t keys;   // decode: keys that the row sees
  int64_t part;   // decode: index of the partial result
  int64_t group;  // decode: index of its row and kv head among all of them
};

template <class T>
class Step {
 public:
  explicit Step(const cann::Attention<T>& a) : a_(a), group_(a.heads / a.kv_heads) {}

  // q [kv head][T * group][D] rotated; k, v in the cache.
  void rope_and_write(int64_t t, T* q) const {
    const int64_t d = a_.head_dim;
    const T* row = a_.qkv + t * (a_.heads + 2 * a_.kv_heads) * d;
    const T *cos = a_.cos + t * d, *sin = a_.sin + t * d;
    for (int64_t h = 0; h < a_.heads; h++)
      rotate(row + h * d, cos, sin, q + ((h / group_) * a_.tokens * group_ + t * group_ + h % group_) * d, d);
    const int64_t block = a_.slots[t] / a_.block_size, offset = a_.slots[t] % a_.block_size;
    for (int64_t h = 0; h < a_.kv_heads; h++) {
      const int64_t at = ((block * a_.kv_heads + h) * a_.block_size + offset) * d;
      rotate(row + (a_.heads + h) * d, cos, sin, a_.k_cache + at, d);
      std::memcpy(a_.v_cache + at, row + (a_.heads + a_.kv_heads + h) * d, static_cast<size_t>(d) * sizeof(T));
    }
  }

  // Counts (tasks null) or lists the tasks, prefill first, long ones first; returns how many there are. parts, groups: how
  // many partial results there are, and how many pairs of row and kv head they belong to.
  int64_t list(Task* tasks, int64_t* parts, int64_t* groups) const {
    int64_t n = 0;
    *parts = *groups = 0;
    for (int pass = 0; pass < 2; pass++) {
      for (int64_t s = 0; s < a_.seqs; s++) {
        const int64_t start = s ? a_.query_ends[s - 1] : 0, rows = a_.query_ends[s] - start;
        if (rows <= 0 || (rows > DECODE_ROWS) != (pass == 0)) continue;
        if (pass == 0) {
          const int64_t blocks = (rows * group_ + VIRTUAL_ROWS - 1) / VIRTUAL_ROWS;
          for (int64_t b = blocks - 1; b >= 0; b--)
            for (int64_t h = 0; h < a_.kv_heads; h++, n++)
              if (tasks) tasks[n] = {s, h, b * VIRTUAL_ROWS, -1, 0, 0, 0};
          continue;
        }
        for (int64_t i = 0; i < rows; i++) {
          const int64_t keys = a_.kv_lens[s] - rows + i + 1;
          for (int64_t h = 0; h < a_.kv_heads; h++, (*groups)++)
            for (int64_t key = 0; key < keys; key += CHUNK, n++, (*parts)++)
              if (tasks) tasks[n] = {s, h, key, start + i, keys, *parts, *groups};
        }
      }
    }
    return n;
  }

  // Products of query and key elements in the whole step.
  int64_t multiplies() const {
    int64_t pairs = 0;
    for (int64_t s = 0; s < a_.seqs; s++) pairs += (a_.query_ends[s] - (s ? a_.query_ends[s - 1] : 0)) * a_.kv_lens[s];
    return pairs * a_.heads * a_.head_dim;
  }

  int64_t part_floats() const { return group_ * (a_.head_dim + 2); }

  template <int DIM>
  void run(const Task& task, const T* q, float* parts, std::atomic<int32_t>* done) const {
    static thread_local Scratch scratch;
    const int64_t d = a_.head_dim, stride = a_.kv_heads * a_.block_size * d, head = task.kv_head * a_.block_size * d;
    const int32_t* table = a_.block_table + task.seq * a_.table_width;
    const Pages<T> k{a_.k_cache + head, table, stride, a_.block_size, d};
    const Pages<T> v{a_.v_cache + head, table, stride, a_.block_size, d};
    const T* q_head = q + task.kv_head * a_.tokens * group_ * d;
    if (task.row >= 0) {
      float* acc = parts + task.part * part_floats();
      float *high = acc + group_ * d, *total = high + group_;
      decode_group<T, DIM>(group_, q_head + task.row * group_ * d, k, v, task.first,
                           std::min<int64_t>(task.first + CHUNK, task.keys), a_.scale, acc, high, total);
      // Whoever finishes last joins all parts, always in key order.
      const int64_t count = (task.keys + CHUNK - 1) / CHUNK;
      if (done[task.group].fetch_add(1, std::memory_order_acq_rel) == count - 1)
        merge(task, parts + (task.part - task.first / CHUNK) * part_floats(), count);
      return;
    }
    const int64_t start = task.seq ? a_.query_ends[task.seq - 1] : 0, rows = a_.query_ends[task.seq] - start;
    const int64_t count = std::min<int64_t>(VIRTUAL_ROWS, rows * group_ - task.first);
    prefill_rows(k, v, q_head + (start * group_ + task.first) * d, task.first, count, group_, a_.kv_lens[task.seq] - rows, a_.scale,
                 scratch.get<float>(PrefillScratch<T>::floats(d)), [&](int64_t i, const float* out, float factor) {
                           const int64_t t = start + i / group_, h = task.kv_head * group_ + i % group_;
                           scale_row(out, factor, a_.out + (t * a_.heads + h) * d, d);
                         });
  }

  // Joins the `count` partial results of the task's row and kv head, which begin at `first`.
  void merge(const Task& task, float* first, int64_t count) const {
    const int64_t d = a_.head_dim;
    for (int64_t g = 0; g < group_; g++) {
      float high = -INFINITY, total = 0;
      for (int64_t p = 0; p < count; p++) high = std::max(high, first[p * part_floats() + group_ * d + g]);
      float* acc = first + g * d;
      for (int64_t p = 0; p < count; p++) {
        const float* part = first + p * part_floats();
        const float factor = std::exp(part[group_ * d + g] - high);
        total += factor * part[group_ * (d + 1) + g];
        for (int64_t i = 0; i < d; i += W) {
          Vec x = vmul(vset(factor), vload(part + g * d + i));
          vstore(acc + i, p ? vadd(vload(acc + i), x) : x);
        }
      }
      scale_row(acc, 1.f / total, a_.out + (task.row * a_.heads + task.kv_head * group_ + g) * d, d);
    }
  }

 private:
  const cann::Attention<T>& a_;
  const int64_t group_;
};

template <class T, int DIM>
void attention(const cann::Attention<T>& a) {
  static thread_local Scratch q_memory, task_memory, part_memory, done_memory;
  const Step<T> step(a);
  int64_t parts = 0, groups = 0;
  const int64_t n = step.list(nullptr, &parts, &groups);
  T* q = q_memory.get<T>(a.tokens * a.heads * a.head_dim);
  Task* tasks = task_memory.get<Task>(n);
  float* partial = part_memory.get<float>(parts * step.part_floats());
  step.list(tasks, &parts, &groups);
  auto* done = done_memory.get<std::atomic<int32_t>>(groups);
  for (int64_t i = 0; i < groups; i++) done[i].store(0, std::memory_order_relaxed);
  const int threads = step.multiplies() < SERIAL_MULTIPLIES ? 1 : a.threads;
  const bool few = a.tokens <= SERIAL_ROWS;
  if (few)
    for (int64_t t = 0; t < a.tokens; t++) step.rope_and_write(t, q);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (!few) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < a.tokens; t++) step.rope_and_write(t, q);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++) step.template run<DIM>(tasks[i], q, partial, done);
  }
}

}  // namespace

namespace cann {

template <class T>
void rope_paged_attention(const Attention<T>& a) {
  if (a.head_dim == 64) attention<T, 64>(a);
  else if (a.head_dim == 128) attention<T, 128>(a);
  else attention<T, 0>(a);
}

template void rope_paged_attention<float>(const Attention<float>&);
template void rope_paged_attention<bf16>(const Attention<bf16>&);

}  // namespace cann
