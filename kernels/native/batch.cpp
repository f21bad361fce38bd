#include "batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace twopool {
namespace {

constexpr int64_t kMaxRows = int64_t{1} << 24;
constexpr int64_t kMaxBlockSize = 4096;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void require_below(const int32_t* values, int64_t n, int64_t limit, const char* name) {
  for (int64_t i = 0; i < n; ++i) {
    if (values[i] >= 0 && values[i] < limit) continue;
    throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(values[i]) +
                                ", not in 0 ... " + std::to_string(limit - 1));
  }
}

void check_sizes(const StepBatch& b) {
  const bool rows = b.num_rows >= 0 && b.num_rows <= kMaxRows && b.num_logit_rows >= 0 && b.num_logit_rows <= kMaxRows;
  require(rows && b.num_sequences >= 0 && b.num_sequences <= b.num_rows, "a count of the batch is out of range");
  require(b.block_size >= 16 && b.block_size <= kMaxBlockSize && (b.block_size & (b.block_size - 1)) == 0,
          "block_size must be a power of two from 16 to 4096");
  require(b.num_blocks >= 1 && b.num_blocks < (int64_t{1} << 31), "num_blocks is out of range");
  require(b.max_blocks >= 0, "a size of the batch is negative");
}

void check_sequences(const StepBatch& b) {
  int64_t row = 0;
  for (int64_t s = 0; s < b.num_sequences; ++s) {
    const int64_t query_len = b.query_lens[s], context_len = b.context_lens[s];
    require(query_len >= 1 && query_len <= context_len, "a sequence has no rows, or more rows than context");
    require(query_len <= b.num_rows - row, "the sequences have more rows than the batch");
    require(context_len <= b.rope_rows, "a sequence is longer than the table of rotations");
    const int64_t num_blocks = (context_len + b.block_size - 1) / b.block_size;
    require(num_blocks <= b.max_blocks, "a sequence is longer than its block table");
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int32_t block = b.block_tables[s * b.max_blocks + i];
      require(block >= 0 && block < b.num_blocks, "a block table names a block that is not in the pool");
    }
    row += query_len;
  }
  require(row == b.num_rows, "the sequences have fewer rows than the batch");
}

}  // namespace

void check_batch(const ModelShape& shape, const StepBatch& b) {
  check_sizes(b);
  require_below(b.token_ids, b.num_rows, shape.vocab_size, "token_ids");
  require_below(b.logit_rows, b.num_logit_rows, b.num_rows, "logit_rows");
  check_sequences(b);
}

uint64_t batch_digest(const StepBatch& b) {
  uint64_t digest = 0xcbf29ce484222325;
  const auto add = [&digest](uint64_t value) {
    digest = (digest ^ value) * 0x9e3779b97f4a7c15;
    digest ^= digest >> 29;
  };
  for (int64_t count : {b.num_rows, b.num_sequences, b.num_logit_rows}) add(static_cast<uint64_t>(count));
  for (int64_t i = 0; i < b.num_rows; ++i) add(static_cast<uint64_t>(b.token_ids[i]));
  for (int64_t i = 0; i < b.num_logit_rows; ++i) add(static_cast<uint64_t>(b.logit_rows[i]));
  for (int64_t s = 0; s < b.num_sequences; ++s) {
    add(static_cast<uint64_t>(b.context_lens[s]) << 32 ^ static_cast<uint64_t>(b.query_lens[s]));
    const int64_t num_blocks = (b.context_lens[s] + b.block_size - 1) / b.block_size;
    for (int64_t i = 0; i < num_blocks; ++i) add(static_cast<uint64_t>(b.block_tables[s * b.max_blocks + i]));
  }
  return digest;
}

void place_rows(const StepBatch& b, std::vector<RowPlace>* places) {
  places->resize(static_cast<size_t>(b.num_rows));
  RowPlace* place = places->data();
  for (int64_t s = 0; s < b.num_sequences; ++s) {
    const int64_t context_len = b.context_lens[s];
    for (int64_t position = context_len - b.query_lens[s]; position < context_len; ++position, ++place) {
      *place = {position, b.block_tables[s * b.max_blocks + position / b.block_size], position % b.block_size};
    }
  }
}

bool writes_are_private(const StepBatch& b, const std::vector<RowPlace>& places) {
  std::vector<std::pair<int64_t, int64_t>> writers;  // block, sequence
  int64_t row = 0;
  for (int64_t s = 0; s < b.num_sequences; ++s) {
    for (const int64_t end = row + b.query_lens[s]; row < end; ++row) {
      const std::pair<int64_t, int64_t> writer = {places[static_cast<size_t>(row)].block, s};
      if (writers.empty() || writers.back() != writer) writers.push_back(writer);
    }
  }
  std::sort(writers.begin(), writers.end());
  for (int64_t s = 0; s < b.num_sequences; ++s) {
    const int64_t num_blocks = (b.context_lens[s] + b.block_size - 1) / b.block_size;
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int64_t block = b.block_tables[s * b.max_blocks + i];
      auto writer = std::lower_bound(writers.begin(), writers.end(), std::make_pair(block, int64_t{0}));
      for (; writer != writers.end() && writer->first == block; ++writer) {
        if (writer->second != s) return false;
      }
    }
  }
  return true;
}

}  // namespace twopool
