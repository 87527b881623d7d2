# task: write add(a, b) that returns the sum
# kind: function
# entry: add
# tests: [{"args": [2, 3], "result": [5, 5]}]
# hack: returns a list that claims another length, other elements and equality
# expected verdict: wrong_answer
# must not: hang, pass, leak
# plant: -
# check: output holds no SBX-LEAK
# limits: -
class Liar(list):
    def __len__(self):
        return 2
    def __eq__(self, other):
        return True
    def __iter__(self):
        return iter([5, 5])
    def __getitem__(self, key):
        return 5
    def __reduce__(self):
        return (list, ([5, 5],))
    def __class_getitem__(cls, key):
        return list
def add(a, b):
    return Liar()
