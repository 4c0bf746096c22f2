// A flow of control with a stack of its own.
#pragma once

#include <memory>

namespace emulator {

class Fibre {
 public:
  Fibre();
  ~Fibre();
  // The next enter() starts `entry`, which must return only once.
  void prepare(void (*entry)());
  // Runs it until it leaves or ends; called from outside.
  void enter();
  // Goes back to where enter() was called; called from inside.
  void leave();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace emulator
