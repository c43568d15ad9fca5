package dragoman

import (
	"reflect"
	"testing"

	"dragoman.dev/clients/go/dragomanv1"
)

func delta(choice uint32, cursor uint64, ids ...uint32) *dragomanv1.GenerationDelta {
	return &dragomanv1.GenerationDelta{ChoiceIndex: choice, Cursor: cursor, TokenIds: ids, Text: "x"}
}

func ending(d *dragomanv1.GenerationDelta) *dragomanv1.GenerationDelta {
	d.Finish = &dragomanv1.ChoiceFinish{Reason: dragomanv1.FinishReason_FINISH_REASON_LENGTH}
	return d
}

func TestTake(t *testing.T) {
	p := newProgress(2)
	for _, c := range []struct {
		why    string
		delta  *dragomanv1.GenerationDelta
		taken  bool
		failed bool
	}{
		{"the first", delta(0, 0, 1, 2), true, false},
		{"of another choice", delta(1, 0, 9), true, false},
		{"doubled, whole", delta(0, 0, 1, 2), false, false},
		{"doubled, a part of it", delta(0, 1, 2), false, false},
		{"partly new", delta(0, 1, 2, 3), false, true},
		{"a gap", delta(0, 3, 4), false, true},
		{"a choice that was not asked for", delta(2, 0, 1), false, true},
		{"text without a token", delta(0, 2), true, false},
		{"the last", ending(delta(0, 2, 3)), true, false},
		{"after the end", delta(0, 3, 4), false, true},
		{"doubled after the end", ending(delta(0, 2, 3)), false, false},
		{"the end of the other, alone", ending(delta(1, 1)), true, false},
	} {
		if _, taken, err := p.take(c.delta); taken != c.taken || (err != nil) != c.failed {
			t.Errorf("%s: taken %v, error %v", c.why, taken, err)
		}
	}
	if !p.complete() || p.numTokens() != 4 {
		t.Errorf("complete %v with %d tokens", p.complete(), p.numTokens())
	}
	results := p.results()
	if !reflect.DeepEqual(results[0].TokenIDs, []uint32{1, 2, 3}) || results[0].Text != "xxx" || results[0].FinishReason != FinishLength {
		t.Errorf("choice 0: %+v", results[0])
	}
}

func TestResumeStateHoldsEachChoice(t *testing.T) {
	p := newProgress(2)
	for _, d := range []*dragomanv1.GenerationDelta{delta(0, 0, 1), ending(delta(1, 0, 5, 6))} {
		if _, _, err := p.take(d); err != nil {
			t.Fatal(err)
		}
	}
	state := p.resumeState(2, 77, 7)
	if state.GetAttempt() != 2 || state.GetOriginEpoch() != 77 || state.GetSeed() != 7 || len(state.GetChoices()) != 2 {
		t.Errorf("%v", state)
	}
	if state.Choices[0].GetFinish() != nil || state.Choices[1].GetFinish() == nil || len(state.Choices[1].GetTokenIds().GetIds()) != 2 {
		t.Errorf("%v", state.Choices)
	}
}
