// The exact look at every agent of a model for a request of one choice. What is computed, and the order of its operations, is
// that of placement.py, so that both give equal numbers; built without contraction of products and sums for that reason.

#include <cstdint>
#include <limits>

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kClosed = -1.0;

// One agent: candidates.Terms. `max_context` is kClosed where it may not be chosen. `row`: number of knots n as a double, n
// contexts, n seconds, n - 1 slopes.
struct Lane {
  double queue, base, per_token, others, share, pace, max_context;
  const double* row;
};

struct Request {
  double prompt_tokens, output_tokens, mean_context, wanted_context, min_context, tie_ratio, first_token_ratio;
};

struct Found {
  int64_t num_ties, chosen, fallback;
  double queue, prefill, step, modelled_step, cached;
};

struct Table {
  const Lane* lanes;
  int64_t num_agents;
  Request request;
  // Agents that hold a part of the prompt, or are barred: their number, then pairs of index and cached tokens (-1: barred).
  int64_t num_special;
  const double* special;
  double* seconds;  // num_agents each
  double* cached;   // all 0 between two calls
  int64_t* ties;
  Found found;
};

double modelled_step(const Lane& lane, double mean_context) {
  const double context = lane.others + lane.share * mean_context;
  const double* row = lane.row;
  const int64_t n = static_cast<int64_t>(row[0]);
  const double *contexts = row + 1, *times = contexts + n, *slopes = times + n;
  int64_t segment = 0;
  while (segment < n - 2 && contexts[segment + 1] <= context) ++segment;
  const double step = times[segment] + (context - contexts[segment]) * slopes[segment];
  return step < 0.0 ? 0.0 : step;
}

double prefill_seconds(const Table& table, int64_t index) {
  const Lane& lane = table.lanes[index];
  double uncached = table.request.prompt_tokens - table.cached[index];
  if (uncached < 1.0) uncached = 1.0;
  const double prefill = uncached * lane.per_token;
  return prefill < lane.base ? lane.base : prefill;
}

double first_token(const Table& table, int64_t index) { return table.lanes[index].queue + prefill_seconds(table, index); }

// Seconds of every agent with so much context, kInfinity where it cannot be best, tie or second. False where there is none.
bool weigh(Table& table, double context, int64_t& best, int64_t& second) {
  const Request& request = table.request;
  const double o = request.output_tokens - 1.0;
  double least = kInfinity, next = kInfinity, limit = kInfinity;
  best = second = -1;
  for (int64_t i = 0; i < table.num_agents; ++i) {
    const Lane& lane = table.lanes[i];
    table.seconds[i] = kInfinity;
    if (lane.max_context < context || table.cached[i] < 0.0) continue;
    const double begun = lane.queue + prefill_seconds(table, i);
    if (begun > limit) continue;  // the decode only adds to it
    const double seconds = begun + o * (lane.pace * modelled_step(lane, request.mean_context));
    table.seconds[i] = seconds;
    if (seconds < least) {
      next = least, second = best;
      least = seconds, best = i;
    } else if (seconds < next || second < 0) {
      next = seconds, second = i;
    } else {
      continue;
    }
    const double tied = least * request.tie_ratio;
    limit = tied > next ? tied : next;
  }
  return best >= 0;
}

void fill(Table& table, int64_t chosen) {
  const Lane& lane = table.lanes[chosen];
  Found& found = table.found;
  found.chosen = chosen;
  found.queue = lane.queue;
  found.prefill = prefill_seconds(table, chosen);
  found.modelled_step = modelled_step(lane, table.request.mean_context);
  found.step = lane.pace * found.modelled_step;
  const double most = table.request.prompt_tokens - 1.0;
  found.cached = table.cached[chosen] < most ? table.cached[chosen] : most;
}

void mark(Table& table, bool clear) {
  for (int64_t i = 0; i < table.num_special; ++i) {
    table.cached[static_cast<int64_t>(table.special[2 * i])] = clear ? 0.0 : table.special[2 * i + 1];
  }
}

}  // namespace

extern "C" {

// Fills `found`; the number of ties, 0 where no agent can take it. With more than one `dragoman_draw` is to follow, which
// says which of them it is.
int64_t dragoman_search(Table* table) {
  mark(*table, false);
  int64_t best, second;
  Found& found = table->found;
  found.num_ties = 0;
  if (weigh(*table, table->request.wanted_context, best, second) ||
      weigh(*table, table->request.min_context, best, second)) {
    const double tied = table->seconds[best] * table->request.tie_ratio;
    for (int64_t i = 0; i < table->num_agents; ++i) {
      if (table->seconds[i] <= tied) table->ties[found.num_ties++] = i;
    }
    fill(*table, best);
    found.fallback = second;
  }
  if (found.num_ties < 2) mark(*table, true);
  return found.num_ties;
}

// Of two ties drawn by these numbers of [0, 1) the faster one, unless its first token comes much later than the best one's.
void dragoman_draw(Table* table, double draw_first, double draw_second) {
  Found& found = table->found;
  const int64_t best = found.chosen, other = found.fallback;
  int64_t first = static_cast<int64_t>(draw_first * static_cast<double>(found.num_ties));
  int64_t second = static_cast<int64_t>(draw_second * static_cast<double>(found.num_ties - 1));
  if (second >= first) ++second;
  int64_t drawn[2] = {table->ties[first], table->ties[second]};
  if (table->seconds[drawn[1]] < table->seconds[drawn[0]]) {
    const int64_t slower = drawn[0];
    drawn[0] = drawn[1], drawn[1] = slower;
  }
  const double latest = first_token(*table, best) * table->request.first_token_ratio;
  int64_t chosen = best;
  for (const int64_t index : drawn) {
    if (index == best || first_token(*table, index) <= latest) {
      chosen = index;
      break;
    }
  }
  if (chosen != best) {
    fill(*table, chosen);
    found.fallback = best;
  } else {
    found.fallback = other;
  }
  mark(*table, true);
}

// The size of what Python lays out, so that a library of another version is never used.
int64_t dragoman_search_layout() { return static_cast<int64_t>(sizeof(Table) * 1000 + sizeof(Lane)); }

}
