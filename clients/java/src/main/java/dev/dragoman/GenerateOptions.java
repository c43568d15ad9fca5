package dev.dragoman;

import com.google.protobuf.ByteString;
import dev.dragoman.v1.Grammar;
import dev.dragoman.v1.GrammarChoices;
import dev.dragoman.v1.SamplingParameters;
import dev.dragoman.v1.StopCriteria;
import dev.dragoman.v1.TextOptions;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/**
 * Options of a generation. One that is left out means the model's own default. Names and ranges are those of
 * SamplingParameters and StopCriteria in generation_service.proto. Bad values throw a {@link DragomanException} that names
 * them.
 */
public final class GenerateOptions {
  /** No option is given. */
  public static final GenerateOptions NONE = builder().build();

  final Optional<String> model;
  final Optional<String> requestId;
  final Optional<Duration> deadline;
  final Optional<Duration> maxQueueWait;
  final Priority priority;
  final String cacheSalt;
  final SamplingParameters sampling;
  final StopCriteria stop;
  final TextOptions text;

  private GenerateOptions(Builder builder) {
    model = Optional.ofNullable(builder.model).filter(name -> !name.isEmpty());
    requestId = Optional.ofNullable(builder.requestId).filter(id -> !id.isEmpty());
    deadline = Optional.ofNullable(builder.deadline);
    maxQueueWait = Optional.ofNullable(builder.maxQueueWait);
    priority = builder.priority;
    cacheSalt = builder.cacheSalt;
    sampling = builder.sampling.build();
    stop = builder.stop.build();
    text = builder.text.build();
  }

  /** Starts with no option given. */
  public static Builder builder() {
    return new Builder();
  }

  /** Collects options; each call replaces what the same call gave before. */
  public static final class Builder {
    private String model;
    private String requestId;
    private Duration deadline;
    private Duration maxQueueWait;
    private Priority priority = Priority.STANDARD;
    private String cacheSalt = "";
    private final SamplingParameters.Builder sampling = SamplingParameters.newBuilder();
    private final StopCriteria.Builder stop = StopCriteria.newBuilder();
    private final TextOptions.Builder text = TextOptions.newBuilder();

    private Builder() {}

    /** The options so far. */
    public GenerateOptions build() {
      return new GenerateOptions(this);
    }

    /** The model; may be left out where one is served. */
    public Builder model(String model) {
      this.model = model;
      return this;
    }

    /** Names the request, for cancel; a random UUID where it is left out. */
    public Builder requestId(String requestId) {
      this.requestId = requestId;
      return this;
    }

    /** Bounds everything, the wait in the queue included. */
    public Builder deadline(Duration deadline) {
      this.deadline = Requests.positive("deadline", deadline);
      return this;
    }

    /** The longest wait in the controller's queue. */
    public Builder maxQueueWait(Duration maxQueueWait) {
      this.maxQueueWait = Requests.positive("max_queue_wait", maxQueueWait);
      return this;
    }

    /** Class of service. */
    public Builder priority(Priority priority) {
      this.priority = priority;
      return this;
    }

    /** Separates prefix caches that must not be shared. */
    public Builder cacheSalt(String cacheSalt) {
      this.cacheSalt = cacheSalt;
      Requests.utf8("cache_salt", cacheSalt);
      return this;
    }

    /** Most tokens to generate; left out, up to the end of the context. */
    public Builder maxOutputTokens(int maxOutputTokens) {
      stop.setMaxOutputTokens(Requests.notNegative("max_output_tokens", maxOutputTokens));
      return this;
    }

    /** No end before this many tokens. */
    public Builder minOutputTokens(int minOutputTokens) {
      stop.setMinOutputTokens(Requests.notNegative("min_output_tokens", minOutputTokens));
      return this;
    }

    /** Strings that end the output, each of at least one character. */
    public Builder stop(List<String> stop) {
      this.stop.clearStrings();
      for (String one : stop) {
        ByteString utf8 = Requests.utf8("stop", one);
        if (utf8.isEmpty()) {
          throw Errors.invalid("stop", "a stop string is empty; give at least one character");
        }
        this.stop.addStringsBytes(utf8);
      }
      return this;
    }

    /** Tokens that end the output besides the model's own. */
    public Builder stopTokenIds(List<Integer> stopTokenIds) {
      stop.clearTokenIds().addAllTokenIds(stopTokenIds);
      return this;
    }

    /** Keep the stop string that matched at the end of the text. */
    public Builder includeStopString(boolean includeStopString) {
      stop.setIncludeStopString(includeStopString);
      return this;
    }

    /** Generate past the model's end-of-sequence tokens. */
    public Builder ignoreEos(boolean ignoreEos) {
      stop.setIgnoreEos(ignoreEos);
      return this;
    }

    /** 0 is greedy; 0 to 2. */
    public Builder temperature(float temperature) {
      sampling.setTemperature(temperature);
      return this;
    }

    /** Nucleus mass, over 0 to 1. */
    public Builder topP(float topP) {
      sampling.setTopP(topP);
      return this;
    }

    /** Candidates kept; 0 keeps all. */
    public Builder topK(int topK) {
      sampling.setTopK(Requests.notNegative("top_k", topK));
      return this;
    }

    /** Least probability relative to the best candidate, 0 to 1. */
    public Builder minP(float minP) {
      sampling.setMinP(minP);
      return this;
    }

    /** Seed of the random numbers, unsigned. */
    public Builder seed(long seed) {
      sampling.setSeed(seed);
      return this;
    }

    /** Divides the logits of tokens seen; over 0, 1 is off. */
    public Builder repetitionPenalty(float repetitionPenalty) {
      sampling.setRepetitionPenalty(repetitionPenalty);
      return this;
    }

    /** Subtracted for each occurrence in the output; -2 to 2. */
    public Builder frequencyPenalty(float frequencyPenalty) {
      sampling.setFrequencyPenalty(frequencyPenalty);
      return this;
    }

    /** Subtracted once for a token in the output; -2 to 2. */
    public Builder presencePenalty(float presencePenalty) {
      sampling.setPresencePenalty(presencePenalty);
      return this;
    }

    /** Added to the logit of a token; -100 to 100. */
    public Builder logitBias(Map<Integer, Float> logitBias) {
      sampling.clearLogitBias().putAllLogitBias(logitBias);
      return this;
    }

    /** When not empty, only these tokens may be sampled. */
    public Builder allowedTokenIds(List<Integer> allowedTokenIds) {
      sampling.clearAllowedTokenIds().addAllAllowedTokenIds(allowedTokenIds);
      return this;
    }

    /** Texts that must not appear. */
    public Builder badWords(List<String> badWords) {
      sampling.clearBadWords();
      badWords.forEach(word -> sampling.addBadWordsBytes(Requests.utf8("bad_words", word)));
      return this;
    }

    /** How many outputs to generate. */
    public Builder numChoices(int numChoices) {
      sampling.setNumChoices(Requests.notNegative("num_choices", numChoices));
      return this;
    }

    /** Alternatives reported with each token; left out, no log-probabilities. */
    public Builder logprobs(int logprobs) {
      sampling.setNumLogprobs(Requests.notNegative("logprobs", logprobs));
      return this;
    }

    /** Alternatives reported with each prompt token. */
    public Builder promptLogprobs(int promptLogprobs) {
      sampling.setNumPromptLogprobs(Requests.notNegative("prompt_logprobs", promptLogprobs));
      return this;
    }

    /** The output is an instance of this JSON schema. It has one form: the last that is given. */
    public Builder jsonSchema(String jsonSchema) {
      sampling.setGrammar(Grammar.newBuilder().setJsonSchemaBytes(Requests.utf8("json_schema", jsonSchema)));
      return this;
    }

    /** The output is a JSON object. */
    public Builder jsonObject() {
      sampling.setGrammar(Grammar.newBuilder().setJsonObject(true));
      return this;
    }

    /** The whole output matches this expression. */
    public Builder regex(String regex) {
      sampling.setGrammar(Grammar.newBuilder().setRegexBytes(Requests.utf8("regex", regex)));
      return this;
    }

    /** The output is one of these texts. */
    public Builder oneOf(List<String> texts) {
      GrammarChoices.Builder choices = GrammarChoices.newBuilder();
      texts.forEach(one -> choices.addTextsBytes(Requests.utf8("choices", one)));
      sampling.setGrammar(Grammar.newBuilder().setChoices(choices));
      return this;
    }

    /** The output follows this Lark grammar. */
    public Builder lark(String lark) {
      sampling.setGrammar(Grammar.newBuilder().setLarkBytes(Requests.utf8("grammar", lark)));
      return this;
    }

    /** Add what the tokenizer adds at the beginning. */
    public Builder addSpecialTokens(boolean addSpecialTokens) {
      text.setAddSpecialTokens(addSpecialTokens);
      return this;
    }

    /** Read control tokens written out in the prompt as such. */
    public Builder parseSpecialTokens(boolean parseSpecialTokens) {
      text.setParseSpecialTokens(parseSpecialTokens);
      return this;
    }

    /** Leave control tokens out of the output text. */
    public Builder skipSpecialTokens(boolean skipSpecialTokens) {
      text.setSkipSpecialTokens(skipSpecialTokens);
      return this;
    }
  }
}
