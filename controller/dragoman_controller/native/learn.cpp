// What was learnt of one agent's speed. What is computed, and the order of its operations, is that of quote.py, intervals.py
// and regression.py, and so are the constants.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int kNumQuantities = 3, kMaxRatios = 128, kNumLengths = 4, kMinNumSpread = 32, kMinNumOwn = kMaxRatios, kSize = 4;
constexpr double kTail = 0.1, kLevelGain = 0.005, kLowestLevel = 0.01, kHighestLevel = 0.2;
constexpr double kInsideStep = kLevelGain * kTail, kOutsideStep = kLevelGain * (kTail - 1.0);
constexpr double kForgetting = 0.99, kMaxError = 1.0, kMaxFeature = 8.0, kMaxWeight = 64.0, kMaxVariance = 10.0;
constexpr double kFirstVariance = 0.3, kPriorVariance = 1.0, kFirstNoise = 0.01, kMinNoise = 1e-6;
constexpr double kNoiseGain = 1.0 - kForgetting;
constexpr double kMinLearnSeconds = 0.05, kOverheadSeconds = 0.05, kStepSeconds = 0.02;
constexpr int64_t kPaceOutcomes = 500, kPriorOutcomes = 4;

// The latest ratios of observed to predicted seconds, in the order in which they came and in their own.
struct Window {
  int64_t count, oldest;
  double latest[kMaxRatios], sorted[kMaxRatios + 1];

  void begin(const double* prior, int64_t num_prior) {
    count = num_prior, oldest = 0;
    std::copy(prior, prior + num_prior, latest);
    std::copy(prior, prior + num_prior, sorted);
  }

  void push(double ratio) {
    double* const end = sorted + count;
    double* const place = std::upper_bound(sorted, end, ratio);
    std::copy_backward(place, end, end + 1);
    *place = ratio;
    if (count < kMaxRatios) {
      latest[count++] = ratio;
      return;
    }
    double* const gone = std::lower_bound(sorted, end + 1, latest[oldest]);
    std::copy(gone + 1, end + 1, gone);
    latest[oldest] = ratio;
    oldest = (oldest + 1) % kMaxRatios;
  }

  // p10, p50 and p90.
  void measure(double low_level, double high_level, double* quantiles) const {
    const auto part = [](double share, int64_t whole) {
      return static_cast<int64_t>(std::nearbyint(share * static_cast<double>(whole)));
    };
    quantiles[0] = sorted[std::max<int64_t>(part(low_level, count + 1), 1) - 1];
    quantiles[1] = sorted[part(0.5, count - 1)];
    quantiles[2] = sorted[count - std::max<int64_t>(part(high_level, count + 1), 1)];
  }
};

// Those of all requests and of each length apart, and what share of them lies below p10 and above p90.
struct Windows {
  double low_level, high_level;
  Window all, own[kNumLengths];

  void begin(const double* prior, int64_t num_prior) {
    low_level = high_level = kTail;
    all.begin(prior, num_prior);
    for (Window& window : own) window.begin(prior, 0);
  }

  // `promised`: p10, p50 and p90.
  void add(int64_t length, double ratio, const double* promised) {
    low_level = std::clamp(low_level + (ratio < promised[0] ? kOutsideStep : kInsideStep), kLowestLevel, kHighestLevel);
    high_level = std::clamp(high_level + (ratio > promised[2] ? kOutsideStep : kInsideStep), kLowestLevel, kHighestLevel);
    all.push(ratio);
    own[length].push(ratio);
  }

  // Whether enough is known of a length: its quantiles, around those of all where it is not much.
  bool measure_own(int64_t length, const double* of_all, double* quantiles) const {
    const Window& window = own[length];
    if (window.count < kMinNumSpread) return false;
    window.measure(low_level, high_level, quantiles);
    if (window.count < kMinNumOwn) {
      const double scale = of_all[1] / quantiles[1];
      quantiles[0] *= scale, quantiles[1] = of_all[1], quantiles[2] *= scale;
    }
    return true;
  }
};

// Least squares that forget, over up to four features; one that is not there has a weight and a variance of 0.
struct Regression {
  double weights[kSize], covariance[kSize][kSize], prior[kSize], noise;
  int64_t turn, num_weights;

  void begin(const double* expected, int num_features) {
    noise = kFirstNoise, turn = 0, num_weights = num_features;
    for (int row = 0; row < kSize; ++row) {
      weights[row] = prior[row] = row < num_features ? expected[row] : 0.0;
      for (int column = 0; column < kSize; ++column) {
        covariance[row][column] = row == column && row < num_features ? kFirstVariance : 0.0;
      }
    }
  }

  void learn(const double* features, double observed) {
    const double size = std::max(observed, *std::max_element(features, features + kSize) / kMaxFeature);
    double x[kSize], pulls[kSize];
    for (int i = 0; i < kSize; ++i) x[i] = features[i] / size;
    const double error = std::clamp(observed / size - dot(weights, x), -kMaxError, kMaxError);
    noise = std::max(noise + kNoiseGain * (error * error - noise), kMinNoise);
    for (int i = 0; i < kSize; ++i) pulls[i] = dot(covariance[i], x);
    const double total = kForgetting + dot(x, pulls);
    bool is_over = false;
    for (int i = 0; i < kSize; ++i) {
      const double gain = pulls[i] / total;
      weights[i] = std::clamp(weights[i] + gain * error, 0.0, kMaxWeight);
      for (int j = 0; j < kSize; ++j) covariance[i][j] = (covariance[i][j] - gain * pulls[j]) / kForgetting;
      is_over |= covariance[i][i] > kMaxVariance;
    }
    if (is_over) limit();
    lean();
  }

  // Sees the weight whose turn it is at its prior, once more than it was.
  void lean() {
    double pulls[kSize];
    for (int i = 0; i < kSize; ++i) pulls[i] = covariance[i][turn];
    const double total = kPriorVariance / noise + pulls[turn], error = prior[turn] - weights[turn];
    for (int i = 0; i < kSize; ++i) {
      const double gain = pulls[i] / total;
      weights[i] = std::clamp(weights[i] + gain * error, 0.0, kMaxWeight);
      for (int j = 0; j < kSize; ++j) covariance[i][j] -= gain * pulls[j];
    }
    turn = turn + 1 < num_weights ? turn + 1 : 0;
  }

  void limit() {
    for (int i = 0; i < kSize; ++i) {
      const double variance = covariance[i][i];
      if (variance <= kMaxVariance) continue;
      const double ratio = std::pow(kMaxVariance / variance, 0.5);  // not the square root: Python rounds as this does
      for (int other = 0; other < kSize; ++other) {
        covariance[i][other] *= ratio;
        covariance[other][i] *= ratio;
      }
    }
  }

  static double dot(const double* a, const double* b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]; }
};

struct Learnt {
  Windows windows[kNumQuantities];
  Regression first, decode;
  double learnt_at, log_pace;
  int64_t num_learnt;
};

// Of each quantity, TTFT, TPOT and finish: what was expected and what was seen, and p10, p50 and p90 as they were promised; and of
// which length prompt and output are.
struct Outcome {
  double expected[kNumQuantities], observed[kNumQuantities], promised[kNumQuantities][3];
  int64_t prompt_length, output_length;
};

// Of each quantity the error, -1 where nothing can be said, and whether it was inside; whether enough is known of its length;
// then p10, p50 and p90 of all requests and of those of its length.
struct Verdict {
  double judged[kNumQuantities][2], is_own[kNumQuantities], all[kNumQuantities][3], own[kNumQuantities][3];
};

struct Lesson {
  double queue, prefill, step, decode, observed_step, ttft, tpot, total, num_tokens, now;
};

struct Taught {
  double pace, weights[2 * kSize - 1];
};

}  // namespace

extern "C" {

void dragoman_begin_learning(Learnt* learnt, const double* prior_ratios, int64_t num_ratios) {
  constexpr double first[] = {1.0, 1.0, 1.0, 0.0}, decode[] = {1.0, 0.0, 0.0};
  for (Windows& windows : learnt->windows) windows.begin(prior_ratios, num_ratios);
  learnt->first.begin(first, 4);
  learnt->decode.begin(decode, 3);
  learnt->learnt_at = -HUGE_VAL;
  learnt->log_pace = 0.0;
  learnt->num_learnt = 0;
}

// AgentQuotes.judge.
void dragoman_judge(Learnt* learnt, const Outcome* outcome, Verdict* verdict) {
  for (int i = 0; i < kNumQuantities; ++i) {
    const double expected = outcome->expected[i], observed = outcome->observed[i];
    const double* const promised = outcome->promised[i];
    Windows& windows = learnt->windows[i];
    const int64_t length = i ? outcome->output_length : outcome->prompt_length;
    verdict->is_own[i] = 0.0;
    verdict->judged[i][0] = -1.0;
    if (expected > 0.0 && observed > 0.0) {
      const double middle = expected * promised[1];
      verdict->judged[i][0] = std::fabs(observed - middle) / middle;
      verdict->judged[i][1] = expected * promised[0] <= observed && observed <= expected * promised[2];
      windows.add(length, observed / expected, promised);
    }
    windows.all.measure(windows.low_level, windows.high_level, verdict->all[i]);
    if (verdict->judged[i][0] >= 0.0) verdict->is_own[i] = windows.measure_own(length, verdict->all[i], verdict->own[i]);
  }
}

// AgentQuotes.learn: whether the weights were moved. The pace is, where something was computed and took time.
int64_t dragoman_learn(Learnt* learnt, const Lesson* lesson, Taught* taught) {
  static const double max_log_pace = std::log(32.0);
  const double more_tokens = lesson->num_tokens > 1.0 ? lesson->num_tokens - 1.0 : 0.0;
  const double modelled = lesson->queue + lesson->prefill + lesson->step + more_tokens * lesson->decode;
  if (modelled > 0.0 && lesson->total > 0.0) {
    if (learnt->num_learnt < kPaceOutcomes) ++learnt->num_learnt;
    const double error =
        std::clamp(std::log(lesson->total / modelled) - learnt->log_pace, -max_log_pace, max_log_pace);
    const double weight = static_cast<double>(learnt->num_learnt + kPriorOutcomes);
    learnt->log_pace = std::clamp(learnt->log_pace + error / weight, -max_log_pace, max_log_pace);
  }
  taught->pace = std::exp(learnt->log_pace);
  if (lesson->now - learnt->learnt_at < kMinLearnSeconds) return 0;
  learnt->learnt_at = lesson->now;
  if (lesson->ttft > 0.0) {
    const double features[kSize] = {lesson->queue, lesson->prefill, lesson->step, kOverheadSeconds};
    learnt->first.learn(features, lesson->ttft);
  }
  if (lesson->tpot > 0.0) {
    const double features[kSize] = {lesson->decode, lesson->observed_step, kStepSeconds, 0.0};
    learnt->decode.learn(features, lesson->tpot);
  }
  std::copy(learnt->first.weights, learnt->first.weights + kSize, taught->weights);
  std::copy(learnt->decode.weights, learnt->decode.weights + kSize - 1, taught->weights + kSize);
  return 1;
}

// The size of what the caller keeps for an agent.
int64_t dragoman_learnt_bytes() { return sizeof(Learnt); }
}
