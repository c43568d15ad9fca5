// One step of the model, run by every thread of the team together; phases are split by rows, output rows or heads,
// never along a sum.
#include <cmath>

#include "attention.h"
#include "llama.h"

namespace dragoman {
namespace {

using simd::F;

// out = x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).
void rms_norm(const float* x, const float* weight, int count, float eps, float* out) {
  F squares = simd::splat(0.0f);
  int i = 0;
  for (; i + 16 <= count; i += 16) squares = simd::fma(simd::load(x + i), simd::load(x + i), squares);
  float total = simd::sum(squares);
  for (int j = i; j < count; ++j) total = total + x[j] * x[j];
  const float inverse = 1.0f / std::sqrt(total / static_cast<float>(count) + eps);
  for (i = 0; i + 16 <= count; i += 16)
    simd::store(out + i, simd::load(x + i) * simd::splat(inverse) * simd::load(weight + i));
  for (; i < count; ++i) out[i] = x[i] * inverse * weight[i];
}

// Calls use(row, products) for all rows of `a` and one group.
template <class Use>
void multiply_group(const Matrix& m, int group, const Activations& a, int rows, bool int8, Use&& use) {
  each_tile(rows, [&](auto height, int first) {
    constexpr int T = decltype(height)::value;
    F out[T];
    product<T>(m, group, a, first, int8, out);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) use(first + t, out[t]);
  });
}

// Logits of the first `count` rows of `last`: shared loop number `loop`.
void multiply_head(Llama& model, int loop, int count, float* logits) {
  const Matrix& head = model.output_head();
  model.team->share(loop, head.groups, std::max(1, head.groups / (model.team->size() * 32)), [&](int group) {
    const int lanes = std::min(16, head.rows - 16 * group);
    multiply_group(head, group, model.last, count, model.config.int8_activations, [&](int t, F y) {
      simd::store_partial(logits + size_t(t) * head.rows + 16 * group, y, lanes);
    });
  });
}

template <class KV>
class Step {
 public:
  Step(Llama& model, const dragoman_llama_batch& batch, KV* keys, KV* values, float* logits, float* hidden, int thread)
      : model_(model), c_(model.config), batch_(batch), keys_(keys), values_(values), logits_(logits), hidden_(hidden),
        own_norms_(batch.num_tokens <= kPrivateRows),
        normed_(own_norms_ ? model.private_normed[thread] : model.normed) {}

  // Every thread runs a copy of its own, so `loop_` counts alike in all.
  void run() {
    embed();
    for (int layer = 0; layer < c_.num_layers; ++layer) {
      const Layer& weights = model_.layers[layer];
      normalize(weights.vectors[DRAGOMAN_INPUT_NORM]);
      project_qkv(weights);
      if (model_.independent)
        place_and_attend(weights, layer);
      else
        place_then_attend(weights, layer);
      quantize_attended();
      add_projection(weights.matrices[DRAGOMAN_O], model_.attended);
      normalize(weights.vectors[DRAGOMAN_POST_NORM]);
      gate(weights);
      add_projection(weights.matrices[DRAGOMAN_DOWN], model_.gated);
    }
    finish();
  }

  static int num_loops(const dragoman_llama_config& c) { return 9 * c.num_layers + 3; }  // at most

 private:
  template <class Item>
  void share(int count, int chunk, Item&& item) {
    model_.team->share(loop_++, count, chunk, item);
  }
  // Groups a thread claims at once: few enough to balance, enough that claiming costs nothing.
  int group_chunk(int groups) const {
    return batch_.num_tokens >= 16 ? 1 : std::max(1, groups / (model_.team->size() * 10));
  }

  void embed() {
    const int half = c_.head_dim / 2;
    share(batch_.num_tokens, 1, [&](int t) {
      read_row(model_.embedding, batch_.token_ids[t], model_.residual.get() + size_t(t) * c_.hidden_size);
      float* rotary = model_.rotary.get() + size_t(t) * c_.head_dim;
      for (int i = 0; i < half; ++i) {
        const float angle = static_cast<float>(batch_.positions[t]) * model_.inverse_frequencies[i];
        rotary[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * c_.rope_attention_factor;
        rotary[half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * c_.rope_attention_factor;
      }
    });
  }

  void normalize(const std::vector<float>& weight) {
    const auto row = [&](int t) {
      const float* x = model_.residual.get() + size_t(t) * c_.hidden_size;
      rms_norm(x, weight.data(), c_.hidden_size, c_.rms_norm_eps, normed_.row(t));
      if (c_.int8_activations) normed_.quantize_row(t);
    };
    if (!own_norms_) return share(batch_.num_tokens, 1, row);
    for (int t = 0; t < batch_.num_tokens; ++t) row(t);
  }

  template <class Use>
  void multiply(const Matrix& m, int group, const Activations& a, int rows, Use&& use) {
    multiply_group(m, group, a, rows, c_.int8_activations, use);
  }

  void project_qkv(const Layer& weights) {
    const Matrix &q = weights.matrices[DRAGOMAN_Q], &k = weights.matrices[DRAGOMAN_K], &v = weights.matrices[DRAGOMAN_V];
    const int groups = q.groups + k.groups + v.groups, cols = model_.qkv_cols();
    share(groups, group_chunk(groups), [&](int item) {
      const Matrix* m = &q;
      int group = item, at = 0;
      if (group >= q.groups) group -= q.groups, at = q.rows, m = &k;
      if (m == &k && group >= k.groups) group -= k.groups, at += k.rows, m = &v;
      float* out = model_.qkv.get() + at + 16 * group;
      multiply(*m, group, normed_, batch_.num_tokens, [&](int t, F y) { simd::store(out + size_t(t) * cols, y); });
    });
  }

  void rotate(float* x, const float* rotary) const {
    const int half = c_.head_dim / 2;
    for (int i = 0; i < half; ++i) {
      const float a = x[i], b = x[half + i], cosine = rotary[i], sine = rotary[half + i];
      x[i] = a * cosine - b * sine;
      x[half + i] = b * cosine + a * sine;
    }
  }

  size_t page_stride() const { return size_t(c_.num_kv_heads) * c_.head_dim * c_.page_size; }
  size_t layer_stride() const { return page_stride() * c_.num_blocks; }

  // Norm, rotation and scale of `count` query heads of token t.
  void prepare_queries(const Layer& weights, int t, int first_head, int count) {
    const int dim = c_.head_dim;
    const std::vector<float>& norm = weights.vectors[DRAGOMAN_Q_NORM];
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int h = first_head; h < first_head + count; ++h) {
      float* q = model_.qkv.get() + size_t(t) * model_.qkv_cols() + h * dim;
      if (!norm.empty()) rms_norm(q, norm.data(), dim, c_.rms_norm_eps, q);
      rotate(q, model_.rotary.get() + size_t(t) * dim);
      for (int d = 0; d < dim; ++d) q[d] *= scale;
    }
  }

  // Norm and rotation of one key head of token t, and its K and V into the token's slot.
  void store_key_value(const Layer& weights, int layer, int t, int head) {
    const int dim = c_.head_dim, page = c_.page_size, slot = batch_.slot_mapping[t];
    const std::vector<float>& norm = weights.vectors[DRAGOMAN_K_NORM];
    float* k = model_.qkv.get() + size_t(t) * model_.qkv_cols() + model_.q_cols() + head * dim;
    const float* v = k + model_.kv_cols();
    if (!norm.empty()) rms_norm(k, norm.data(), dim, c_.rms_norm_eps, k);
    rotate(k, model_.rotary.get() + size_t(t) * dim);
    const size_t at = layer * layer_stride() + slot / page * page_stride() + size_t(head) * dim * page;
    for (int d = 0; d < dim; ++d) {
      store_cached(keys_ + at + size_t(d) * page + slot % page, k[d]);
      store_cached(values_ + at + size_t(slot % page) * dim + d, v[d]);
    }
  }

  void attend_tile(int layer, const AttentionTile& tile, int head) {
    const int dim = c_.head_dim, group = c_.num_heads / c_.num_kv_heads;
    const size_t at = layer * layer_stride() + size_t(head) * dim * c_.page_size;
    const int32_t* table = batch_.block_tables + size_t(tile.seq) * batch_.max_num_blocks;
    const Pages<KV> pages{keys_ + at, values_ + at, table, c_.page_size, dim, page_stride()};
    const float* q[simd::kAttentionRows];
    float* out[simd::kAttentionRows];
    int position[simd::kAttentionRows], rows[simd::kAttentionRows], columns[simd::kAttentionRows];
    for (int r = 0; r < tile.count; ++r) {
      rows[r] = batch_.query_starts[tile.seq] + (tile.first + r) / group;
      columns[r] = (head * group + (tile.first + r) % group) * dim;
      q[r] = model_.qkv.get() + size_t(rows[r]) * model_.qkv_cols() + columns[r];
      out[r] = model_.attended.row(rows[r]) + columns[r];
      position[r] = batch_.positions[rows[r]];
    }
    attend_rows<KV>(tile.count, pages, q, position, out);
    if (!quantize_with_attention()) return;
    for (int r = 0; r < tile.count; ++r)
      for (int d = 0; d < dim; d += kBlock)
        model_.attended.quantize_block(rows[r], (columns[r] + d) / kBlock, simd::load(out[r] + d), simd::load(out[r] + d + 16));
  }

  // Decode: a kv head of a sequence needs nothing of the others, so one phase does all of it.
  void place_and_attend(const Layer& weights, int layer) {
    const int heads = c_.num_kv_heads, group = c_.num_heads / heads;
    share(batch_.num_seqs * heads, 1, [&](int item) {
      const int seq = item / heads, head = item % heads, t = batch_.query_starts[seq];
      prepare_queries(weights, t, head * group, group);
      store_key_value(weights, layer, t, head);
      for (int first = 0; first < group; first += simd::kAttentionRows)
        attend_tile(layer, {seq, first, std::min(simd::kAttentionRows, group - first)}, head);
    });
  }

  // Prefill: every K and V of the step is in its slot before the first query looks.
  void place_then_attend(const Layer& weights, int layer) {
    share(batch_.num_tokens, 1, [&](int t) {
      prepare_queries(weights, t, 0, c_.num_heads);
      for (int head = 0; head < c_.num_kv_heads; ++head) store_key_value(weights, layer, t, head);
    });
    const int heads = c_.num_kv_heads, num_tiles = static_cast<int>(model_.tiles.size());
    // Last tiles first: they have the longest contexts.
    share(num_tiles * heads, 1, [&](int item) {
      attend_tile(layer, model_.tiles[num_tiles - 1 - item / heads], item % heads);
    });
  }

  bool quantize_with_attention() const { return c_.int8_activations && c_.head_dim % kBlock == 0; }

  void quantize_attended() {
    if (c_.int8_activations && !quantize_with_attention())
      share(batch_.num_tokens, 1, [&](int t) { model_.attended.quantize_row(t); });
  }

  void add_projection(const Matrix& m, const Activations& a) {
    share(m.groups, group_chunk(m.groups), [&](int group) {
      float* residual = model_.residual.get() + 16 * group;
      const int lanes = std::min(16, m.rows - 16 * group);
      multiply(m, group, a, batch_.num_tokens, [&](int t, F y) {
        float* row = residual + size_t(t) * c_.hidden_size;
        simd::store_partial(row, simd::load(row) + y, lanes);
      });
    });
  }

  // silu(gate) * up, two groups of rows at a time so that a block of 32 is quantised where it is made.
  void gate(const Layer& weights) {
    const Matrix &gates = weights.matrices[DRAGOMAN_GATE], &ups = weights.matrices[DRAGOMAN_UP];
    const int pairs = (gates.groups + 1) / 2;
    const bool quantize_here = c_.int8_activations && gates.rows % kBlock == 0;
    share(pairs, group_chunk(pairs), [&](int pair) {
      each_tile(batch_.num_tokens, [&](auto height, int first) {
        constexpr int T = decltype(height)::value;
        F y[2][T], up[T];
        for (int i = 0; i < 2 && 2 * pair + i < gates.groups; ++i) {
          product<T>(gates, 2 * pair + i, normed_, first, c_.int8_activations, y[i]);
          product<T>(ups, 2 * pair + i, normed_, first, c_.int8_activations, up);
          const int lanes = std::min(16, gates.rows - 32 * pair - 16 * i);
          for (int t = 0; t < T; ++t) {
            const F x = y[i][t];
            y[i][t] = x / (simd::splat(1.0f) + simd::exp(simd::splat(0.0f) - x)) * up[t];
            if (!quantize_here) simd::store_partial(model_.gated.row(first + t) + 32 * pair + 16 * i, y[i][t], lanes);
          }
        }
        if (!quantize_here) return;
        const bool keep = !weights.matrices[DRAGOMAN_DOWN].quantized();
        for (int t = 0; t < T; ++t) {
          model_.gated.quantize_block(first + t, pair, y[0][t], y[1][t]);
          if (!keep) continue;
          simd::store(model_.gated.row(first + t) + 32 * pair, y[0][t]);
          simd::store(model_.gated.row(first + t) + 32 * pair + 16, y[1][t]);
        }
      });
    });
  }

  // Final norm of the wanted rows, then the head for those whose logits are.
  void finish() {
    const int wanted = static_cast<int>(model_.last_rows.size()), num_logits = batch_.num_logit_seqs;
    share(wanted, 1, [&](int i) {
      const float* x = model_.residual.get() + size_t(model_.last_rows[i]) * c_.hidden_size;
      const bool logit = i < num_logits;
      float* out = logit ? model_.last.row(i) : hidden_ + size_t(i - num_logits) * c_.hidden_size;
      rms_norm(x, model_.final_norm.data(), c_.hidden_size, c_.rms_norm_eps, out);
      if (logit && c_.int8_activations) model_.last.quantize_row(i);
    });
    if (num_logits) multiply_head(model_, loop_++, num_logits, logits_);
  }

  Llama& model_;
  const dragoman_llama_config& c_;
  const dragoman_llama_batch& batch_;
  KV *keys_, *values_;
  float *logits_, *hidden_;
  const bool own_norms_;
  const Activations& normed_;
  int loop_ = 0;
};

void lay_out(Llama& model, const dragoman_llama_batch& batch) {
  const int group = model.config.num_heads / model.config.num_kv_heads;
  model.tiles.clear();
  model.last_rows.clear();
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int rows = (batch.query_starts[seq + 1] - batch.query_starts[seq]) * group;
    for (int first = 0; first < rows; first += simd::kAttentionRows)
      model.tiles.push_back({seq, first, std::min(simd::kAttentionRows, rows - first)});
  }
  for (int i = 0; i < batch.num_logit_seqs; ++i) model.last_rows.push_back(batch.query_starts[batch.logit_seqs[i] + 1] - 1);
  for (int i = 0; i < batch.num_hidden_seqs; ++i) model.last_rows.push_back(batch.query_starts[batch.hidden_seqs[i] + 1] - 1);
  model.last_rows.insert(model.last_rows.end(), batch.hidden_rows, batch.hidden_rows + batch.num_hidden_rows);
}

template <class KV>
void run_with(Llama& model, const dragoman_llama_batch& batch, KV* keys, KV* values, float* logits, float* hidden) {
  lay_out(model, batch);
  model.team->run(Step<KV>::num_loops(model.config),
                  [&](int thread) { Step<KV>(model, batch, keys, values, logits, hidden, thread).run(); });
}

}  // namespace

void run_step(Llama& model, const dragoman_llama_batch& batch, float* logits, float* hidden) {
  if (model.config.int8_activations)
    run_with(model, batch, model.keys16.get(), model.values16.get(), logits, hidden);
  else
    run_with(model, batch, model.keys32.get(), model.values32.get(), logits, hidden);
}

void run_head(Llama& model, int count, const float* hidden, float* logits) {
  model.team->run(2, [&](int) {
    model.team->share(0, count, 1, [&](int i) {
      std::copy_n(hidden + size_t(i) * model.config.hidden_size, model.config.hidden_size, model.last.row(i));
      if (model.config.int8_activations) model.last.quantize_row(i);
    });
    multiply_head(model, 1, count, logits);
  });
}

}  // namespace dragoman
